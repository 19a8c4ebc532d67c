"""Model folders: their device, whether packing is exact for them, and tiny ones made on the spot."""
