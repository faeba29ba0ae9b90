//! Numbers that nobody can guess.

use rustix::rand::{GetRandomFlags, getrandom};

use crate::errors::{StartError, error};

pub(crate) fn no_chance(e: &std::io::Error) -> StartError {
    error(format!("getrandom: {e}"), "report this")
}

/// Numbers that nobody can guess.
pub(crate) fn random() -> std::io::Result<[u64; 4]> {
    let mut bytes = [0; 32];
    // So few come whole (getrandom(2)).
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    let (words, _) = bytes.as_chunks();
    Ok(std::array::from_fn(|i| u64::from_le_bytes(words[i])))
}
