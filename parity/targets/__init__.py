"""The sides of a comparison, one file each: whatever takes token ids and gives logits."""
