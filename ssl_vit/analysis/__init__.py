"""Pictures of what a trained ViT has learned."""
