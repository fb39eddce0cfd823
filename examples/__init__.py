"""Programs that use or prepare models for nanoengine. `train_demo.py` trains the bundled model."""
