"""Hours of load on one engine, with the same few prompts asked again and again between it."""
