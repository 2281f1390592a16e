"""What makes the INT8 model more accurate after it is placed."""
