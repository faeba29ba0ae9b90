//! See `nightporter_fuzz_targets::streams`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nightporter_fuzz_targets::streams::run(data));
