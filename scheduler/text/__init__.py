"""Between token ids and what a client reads: token by token, choice by choice."""
