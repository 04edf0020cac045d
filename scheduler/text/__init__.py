"""From token ids to what a client reads: token by token, choice by choice."""
