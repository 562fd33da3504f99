"""The file operations that the protocols stand on, and what real filesystems do to them."""
