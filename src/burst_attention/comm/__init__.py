"""Communication over process groups: exchanges in flight, deadlines and agreement. Tensors are opaque bytes here."""
