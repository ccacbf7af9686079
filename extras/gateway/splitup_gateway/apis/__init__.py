"""What existing clients speak: the APIs of OpenAI, Anthropic and Ollama."""
