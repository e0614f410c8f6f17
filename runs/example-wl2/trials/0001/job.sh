# nothing runs: the recorded row of tp=1 pp=2 dp=8 zero_stage=1 micro_batch_size=1 is read (The Ultra-Scale Playbook, benchmark figure (Hugging Face nanotron team))
