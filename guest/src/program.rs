//! Programs of the guest: those that are run to their end, and those that stay and are controlled
//! over their standard input and output.

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, PipeReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// A program without output for so long is stuck, whatever else runs on its CPU: between two
/// outputs it works for less than a second.
pub(crate) const SILENCE: Duration = Duration::from_secs(60);

/// A program that was run.
#[derive(Debug)]
pub(crate) struct Ran {
    /// It has ended, and well.
    pub(crate) ok: bool,
    /// Its output, and where it was stuck if it was killed for its silence.
    pub(crate) output: String,
}

/// Runs a program until it and all processes that hold its output have ended.
pub(crate) fn run(
    program: &str,
    arguments: &[String],
    environment: Vec<(String, String)>,
    silence: Duration,
) -> Result<Ran> {
    let (mut output, words) = std::io::pipe()?;
    let mut command = Command::new(program);
    command.args(arguments).envs(environment).process_group(0);
    command.stdin(Stdio::null()).stdout(words.try_clone()?).stderr(words);
    let mut child = command.spawn().with_context(|| program.to_owned())?;
    drop(command); // and with it this process's own copy of the pipe's other end
    let mut said = Vec::new();
    let is_over = heard(&mut output, &mut said, silence)?;
    let mut report = String::new();
    if !is_over {
        let _ = write!(report, "\n{program} has said nothing for {silence:?}\n{}", standing());
        killpg(Pid::from_raw(i32::try_from(child.id())?), Signal::SIGKILL)?;
    }
    let ok = child.wait().is_ok_and(|status| ExitStatus::success(&status)) && is_over;
    Ok(Ran { ok, output: String::from_utf8_lossy(&said).into_owned() + &report })
}

/// Reads the output to its end. `false`: there was none for so long.
fn heard(from: &mut PipeReader, said: &mut Vec<u8>, silence: Duration) -> Result<bool> {
    let (limit, mut part) = (PollTimeout::try_from(silence)?, [0; 4096]);
    while poll(&mut [PollFd::new(from.as_fd(), PollFlags::POLLIN)], limit)? > 0 {
        match from.read(&mut part)? {
            0 => return Ok(true),
            got => said.extend_from_slice(&part[..got]),
        }
    }
    Ok(false)
}

/// The wait of each thread of each program, a line each.
fn standing() -> String {
    let mut lines = String::new();
    let entries = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten();
    for process in entries(Path::new("/proc")) {
        // The kernel's own have no file.
        if fs::read_link(process.path().join("exe")).is_err() {
            continue;
        }
        for task in entries(&process.path().join("task")) {
            let told = |name: &str| {
                let text = fs::read_to_string(task.path().join(name)).unwrap_or_default();
                text.trim().to_owned()
            };
            let (pid, tid) = (process.file_name(), task.file_name());
            let (pid, tid) = (pid.to_string_lossy(), tid.to_string_lossy());
            let (comm, wchan, call) = (told("comm"), told("wchan"), told("syscall"));
            let _ = writeln!(lines, "{pid}/{tid} {comm}: {wchan}, system call {call}");
        }
    }
    lines
}

/// One that runs. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    /// Starts it. Its standard error goes to the console.
    pub(crate) fn start(
        program: &str,
        arguments: &[String],
        environment: Vec<(String, String)>,
    ) -> Result<Self> {
        let mut command = Command::new(program);
        command.args(arguments).envs(environment).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| program.to_owned())?;
        let input = child.stdin.take().context("its standard input")?;
        let output = child.stdout.take().context("its standard output")?;
        Ok(Self { child, input, output: BufReader::new(output) })
    }

    /// Sends a line, and waits for one.
    pub(crate) fn say(&mut self, mut line: String) -> Result<String> {
        line.push('\n');
        self.input.write_all(line.as_bytes()).context("speaking to a program")?;
        line.clear();
        self.output.read_line(&mut line).context("hearing a program")?;
        ensure!(line.ends_with('\n'), "the program has ended");
        Ok(line)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_heard_to_its_end() {
        let shell = |script: &str| {
            let ran = run("/bin/sh", &["-c".to_owned(), script.to_owned()], Vec::new(), SILENCE);
            ran.map(|ran| (ran.ok, ran.output)).expect("it ran")
        };
        let said = |words: &str| words.to_owned();
        assert_eq!(shell("echo one; echo two >&2"), (true, said("one\ntwo\n")));
        assert_eq!(shell("echo one; exit 3"), (false, said("one\n")));
    }

    #[test]
    fn a_program_that_stands_still_is_ended_and_tells_where_it_stood() {
        let ran = run("/bin/sleep", &["1000".to_owned()], Vec::new(), Duration::from_millis(50));
        let ran = ran.expect("it ran");
        assert!(!ran.ok && ran.output.contains(" sleep: "), "{}", ran.output);
    }
}
