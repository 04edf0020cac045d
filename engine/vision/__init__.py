"""The vision tower of an instance that prefills: a child process turns image files into embeddings.

session --PromptImage--> ImageEncoder (thread, cache) --file--> EncodingChild ==frames==> child: VisionTower
prompt <--embeddings-- future of the prompt <-- cache by digest <-- EncodedImage
"""
