"""What a person sees: everything here consumes the engine's events and never touches the engine."""
