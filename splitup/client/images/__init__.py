"""Images in prompts: files become pixels in a confined process, and then rows of the model."""
