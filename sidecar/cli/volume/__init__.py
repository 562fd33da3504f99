"""Commands for the volume itself: make it, check it, bound it, clean it, back it up."""
