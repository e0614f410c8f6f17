# nothing runs: the recorded row of tp=2 pp=1 dp=256 zero_stage=1 micro_batch_size=1 is read (The Ultra-Scale Playbook, benchmark figure (Hugging Face nanotron team))
