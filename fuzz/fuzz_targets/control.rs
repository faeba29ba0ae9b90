//! See `nightporter_fuzz_targets::control`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nightporter_fuzz_targets::control::run(data));
