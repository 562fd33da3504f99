"""Making what is loaded agree with what is desired, on one replica."""
