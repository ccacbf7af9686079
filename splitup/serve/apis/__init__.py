"""What existing clients speak: the APIs of OpenAI and Ollama, their requests and answers."""
