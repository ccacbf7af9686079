"""Every message that crosses a wire, by subject, with its validation and its bytes."""
