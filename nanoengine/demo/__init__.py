"""The bundled model, and the script that trained it."""
