"""The lessons, which start at README.md, and their code, such as `mini` and `tools`."""
