//! Writes a cpio archive in the "newc" format, which an initramfs has.

use std::io::Write;

use cpio::newc;

/// An archive under construction.
#[derive(Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const REGULAR: u32 = 0o100_000;
const DIRECTORY: u32 = 0o040_000;
const CHARACTER_DEVICE: u32 = 0o020_000;
const SYMLINK: u32 = 0o120_000;

impl Archive {
    /// Adds a directory. Parents come first.
    pub(crate) fn directory(&mut self, name: &str) {
        self.entry(name, DIRECTORY | 0o755, (0, 0), &[]);
    }

    /// Adds an executable file.
    pub(crate) fn file(&mut self, name: &str, content: &[u8]) {
        self.file_as(name, 0o755, content);
    }

    /// Adds a file with these permissions.
    pub(crate) fn file_as(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entry(name, REGULAR | mode & 0o7777, (0, 0), content);
    }

    /// Adds a symbolic link.
    pub(crate) fn symlink(&mut self, name: &str, to: &str) {
        self.entry(name, SYMLINK | 0o777, (0, 0), to.as_bytes());
    }

    /// Adds a character device node.
    pub(crate) fn character_device(&mut self, name: &str, major: u32, minor: u32) {
        self.entry(name, CHARACTER_DEVICE | 0o600, (major, minor), &[]);
    }

    /// The finished archive.
    pub(crate) fn finish(self) -> Vec<u8> {
        newc::trailer(self.bytes).expect("memory takes all")
    }

    fn entry(&mut self, name: &str, mode: u32, (major, minor): (u32, u32), content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).expect("an initramfs file is below 4 GiB");
        let entry = newc::Builder::new(name).ino(self.entries).mode(mode);
        let mut writer = entry.rdev_major(major).rdev_minor(minor).write(&mut self.bytes, size);
        writer.write_all(content).expect("it is as long as was said");
        writer.finish().expect("memory takes all");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    #[ignore = "needs the cpio tool"]
    fn the_cpio_tool_lists_what_was_put_in() {
        let mut archive = Archive::default();
        archive.directory("dev");
        archive.character_device("dev/console", 5, 1);
        archive.file("init", b"odd length\0");
        let bytes = archive.finish();
        let mut cpio = Command::new("cpio")
            .args(["-t", "--quiet", "-v"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("cpio starts");
        cpio.stdin.take().expect("piped").write_all(&bytes).expect("cpio reads");
        let out = cpio.wait_with_output().expect("cpio ends");
        assert!(out.status.success());
        let listing = String::from_utf8(out.stdout).expect("ASCII");
        let lines: Vec<&str> = listing.lines().collect();
        assert_eq!(lines.len(), 3, "{listing}");
        assert!(lines[0].starts_with("drwxr-xr-x") && lines[0].ends_with(" dev"));
        assert!(lines[1].starts_with("crw-------") && lines[1].contains("5,   1"));
        assert!(lines[2].starts_with("-rwxr-xr-x") && lines[2].contains(" 11 "));
    }
}
