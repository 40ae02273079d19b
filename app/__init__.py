"""The live service: serves policies, logs interactions and rewards, deploys policy versions."""
