"""Files of a checkpoint as named arrays: headers, index, census, MXFP4. No arithmetic of the model."""
