//! The name of the program that asks, as far as it is known.

use core::fmt;

/// Bytes of a name, with its terminator (`TASK_COMM_LEN` of Linux).
const LEN: usize = 16;

/// The name of a process as `ps` shows it (`/proc/PID/comm`): 15 bytes at most, or none.
#[derive(Clone, Copy, Eq, PartialEq)]
pub struct Program([u8; LEN]);

impl Program {
    /// No name.
    pub const NONE: Self = Self([0; LEN]);

    /// The name in these bytes: up to the first zero, and no more than the kernel keeps.
    #[must_use]
    pub fn of(name: &[u8]) -> Self {
        let mut program = Self::NONE;
        let bytes = name.iter().take(LEN - 1).take_while(|byte| **byte != 0);
        program.0.iter_mut().zip(bytes).for_each(|(to, byte)| *to = *byte);
        program
    }

    /// Its bytes, filled up with zeros.
    #[must_use]
    pub const fn bytes(&self) -> [u8; LEN] {
        self.0
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.0.split(|byte| *byte == 0).next().unwrap_or_default();
        write!(f, "{:?}", String::from_utf8_lossy(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_what_the_kernel_keeps_of_it() {
        assert_eq!(Program::of(b""), Program::NONE);
        assert_eq!(Program::of(b"curl"), Program::of(b"curl\0rest"));
        assert_eq!(Program::of(b"a-name-of-sixteen"), Program::of(b"a-name-of-sixte"));
        assert_eq!(&Program::of(b"a-name-of-sixteen").bytes(), b"a-name-of-sixte\0");
        assert_eq!(format!("{:?}", Program::of(b"curl")), "\"curl\"");
    }
}
