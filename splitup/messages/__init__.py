"""Messages between parties by subject, with their validation and bytes, and the HTTP interface."""
