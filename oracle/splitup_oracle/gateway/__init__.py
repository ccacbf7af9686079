"""The storage gateway, which holds the object store's secret and issues presigned URLs."""
