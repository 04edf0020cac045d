"""The vision tower of an instance that prefills: image files become embeddings, in a child process and off its threads.

session --PromptImage--> ImageEncoder (thread, cache) --file--> EncodingChild ==frames==> child: VisionTower
prompt <--embeddings-- future of the prompt <-- cache by digest <-- EncodedImage
"""
