"""Safe files below everything that is stored: folders, checked JSON and blobs of tensors."""
