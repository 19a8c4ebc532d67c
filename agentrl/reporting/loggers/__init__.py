"""Loggers: TensorBoard, Weights & Biases, MLflow, trackio, and your own."""
