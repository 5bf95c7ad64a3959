"""Scripts that write committed files: icons, catalogues and generated documentation."""
