"""What a node keeps of one execution. The modules beside this folder take, run and send."""
