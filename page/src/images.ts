// Images of a message: files become data URLs, and large ones smaller pictures.

export const MOST_IMAGES = 16; // of a request, as the server allows
const KEPT_BYTES = 256 * 1024; // of a file that is sent as it is: a request carries all images of a talk
const MOST_PIXELS = 1280; // of the longer side of the others; models read fewer
const KINDS = ["image/png", "image/jpeg", "image/webp"]; // that the server reads

/** Return an image as a data URL; raise an error for a file that is none. */
export async function readImage(file: File): Promise<string> {
  let picture: ImageBitmap;
  try {
    picture = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name || "This"} is no image that this browser can read`);
  }
  if (file.size <= KEPT_BYTES && KINDS.includes(file.type)) return readFile(file);
  const scale = Math.min(1, MOST_PIXELS / Math.max(picture.width, picture.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(picture.width * scale));
  canvas.height = Math.max(1, Math.round(picture.height * scale));
  const context = canvas.getContext("2d")!;
  context.fillStyle = "#fff"; // behind what is transparent: a JPEG is not
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

function readFile(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
    reader.readAsDataURL(file);
  });
}
