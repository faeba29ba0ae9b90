//! See `nightporter_fuzz_targets::helpers`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nightporter_fuzz_targets::helpers::run(data));
