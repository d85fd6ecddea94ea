"""The buffers, where DeepEP V2 has them: ``elastic`` for V2's own, ``legacy`` for V1's."""
