//! See `nightporter_fuzz_targets::translate`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| nightporter_fuzz_targets::translate::run(data));
