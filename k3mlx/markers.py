"""Names of the special tokens and their places in the block of 256 that follows the ordinary ranks.

Owns the names and offsets. Ids belong to the tokenizer, which knows where the block starts; what
the markers mean in a prompt belongs to ``chat``, and in the model's output to ``channels``.
Source: text specification §1.2.
"""

BLOCK = 256  # special ids after the last rank

BOS = "[BOS]"
EOS = "[EOS]"
END_OF_MSG = "<|end_of_msg|>"
OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
EOT = "[EOT]"
MEDIA_BEGIN = "<|media_begin|>"
MEDIA_CONTENT = "<|media_content|>"
MEDIA_END = "<|media_end|>"
MEDIA_PAD = "<|media_pad|>"

# offset from the start of the block -> name; every other id N of the block is <|reserved_token_N|>
NAMES = {
    0: BOS,
    1: EOS,
    2: END_OF_MSG,
    3: OPEN,
    4: CLOSE,
    5: SEP,
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: EOT,
    18: MEDIA_BEGIN,
    19: MEDIA_CONTENT,
    20: MEDIA_END,
    21: MEDIA_PAD,
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}

# a name file that disagrees about one of these is not a Kimi K3 one
RELIED_ON = (EOS, END_OF_MSG, OPEN, CLOSE, SEP, EOT, MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD)

STOPS = (END_OF_MSG, EOS, EOT)  # each ends a turn
