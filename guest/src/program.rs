//! Programs of the guest that stay, and are spoken to over their standard input and output.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};

/// One that runs. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    /// Starts it. What it says on standard error goes to the console.
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

    /// Says a line, and waits for one.
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
