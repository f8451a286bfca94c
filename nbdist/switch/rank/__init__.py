"""The switch on a rank: everything is moved first, then committed by all or by none."""
