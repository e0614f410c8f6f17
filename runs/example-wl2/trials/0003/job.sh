# nothing runs: the recorded row of tp=1 pp=8 dp=2 zero_stage=0 micro_batch_size=1 is read (The Ultra-Scale Playbook, benchmark figure (Hugging Face nanotron team))
