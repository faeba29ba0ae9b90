//! Forwarding of 64-byte frames: nightporterd beside DPDK's `net_vhost`, in one run.
//!
//! The front-end is one `dpdk-testpmd` with two `virtio_user` ports in io mode: what it receives
//! on one it transmits on the other. The back-end joins the two ports: for DPDK a second testpmd
//! with two `net_vhost` ports in io mode, which does not look into the frames; for Nightporter the
//! daemon's switch between two VM ports, which parses and checks each one. 1,024 frames circle
//! each way, addressed to the opposite port. Both back-ends have one busy-polling thread on the
//! same core. They take turns for [`ROUNDS`] rounds, each with fresh processes; medians count.
//!
//! The number is the sum of frames received per second on both front-end ports, by testpmd's own
//! clock. It goes into `target/bench/result.json`, beside what `core`'s bench has put there.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

/// Turns each back-end gets.
const ROUNDS: usize = 5;
/// From the first frame to the measurement: addresses are learned, queues have settled.
const WARM_UP: Duration = Duration::from_secs(1);
/// Over which a rate is taken.
const WINDOW: Duration = Duration::from_secs(2);
/// Every process of a turn ends after this many seconds, whatever happens.
const TURN_SECONDS_MAX: &str = "60";
/// The MAC addresses of the two front-end ports.
const MACS: [&str; 2] = ["52:54:00:00:00:01", "52:54:00:00:00:02"];

/// Where things run: one directory on a tmpfs (the daemon's store wants one), three cores.
struct Bench {
    dir: PathBuf,
    /// For testpmd's command line, which only waits for us.
    main_cpu: usize,
    front_cpu: usize,
    back_cpu: usize,
}

impl Bench {
    /// With the cores this process may use; with two, the command lines share one.
    fn new() -> Result<Self> {
        let status = fs::read_to_string("/proc/self/status")?;
        let list = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"));
        let mut cpus = Vec::new();
        for range in list.unwrap_or_default().trim().split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            cpus.extend(first.parse::<usize>()?..=last.parse()?);
        }
        let (main_cpu, front_cpu, back_cpu) = match cpus[..] {
            [first, .., front, back] => (first, front, back),
            [front, back] => (front, front, back),
            _ => bail!("two cores are needed"),
        };
        let dir = PathBuf::from(format!("/dev/shm/nightporter-bench-{}", std::process::id()));
        fs::create_dir(&dir)?;
        Ok(Self { dir, main_cpu, front_cpu, back_cpu })
    }

    fn socket(&self, port: usize) -> PathBuf {
        self.dir.join(format!("{port}.sock"))
    }

    /// Both sockets of a back-end exist.
    fn wait_for_sockets(&self) -> Result<()> {
        for _ in 0..1000 {
            if self.socket(0).exists() && self.socket(1).exists() {
                return Ok(());
            }
            sleep(Duration::from_millis(10));
        }
        bail!("the back-end made no sockets within 10 s")
    }

    /// Millions of frames per second between the two sockets of whatever back-end is there.
    fn measure(&self) -> Result<f64> {
        let vdev = |port: usize| {
            let (path, mac) = (self.socket(port), MACS[port]);
            format!(
                "--vdev=net_virtio_user{port},path={},queues=1,queue_size=1024,mac={mac}",
                path.display()
            )
        };
        let peers = [format!("--eth-peer=0,{}", MACS[1]), format!("--eth-peer=1,{}", MACS[0])];
        let vdevs = [vdev(0), vdev(1)];
        let mut front = Testpmd::spawn(self, "front", self.front_cpu, &vdevs, &peers)?;
        front.command("start tx_first 32")?;
        front.wait_for("io packet forwarding")?;
        sleep(WARM_UP);
        front.rates()?;
        sleep(WINDOW);
        let frames_per_second = front.rates()?;
        front.quit()?;
        for port in [0, 1] {
            let _ = fs::remove_file(self.socket(port)); // the next back-end makes its own
        }
        Ok(frames_per_second / 1e6)
    }

    fn net_vhost(&self) -> Result<f64> {
        let vdev =
            |port: usize| format!("--vdev=net_vhost{port},iface={}", self.socket(port).display());
        let vdevs = [vdev(0), vdev(1)];
        let mut back = Testpmd::spawn(self, "back", self.back_cpu, &vdevs, &[])?;
        back.command("start")?;
        back.wait_for("io packet forwarding")?;
        self.wait_for_sockets()?;
        let mpps = self.measure()?;
        back.quit()?;
        Ok(mpps)
    }

    fn nightporter(&self) -> Result<f64> {
        let config = self.dir.join("nightporter.toml");
        let dir = self.dir.display();
        let mut text = format!(
            "[daemon]\ncontrol = \"{dir}/control.sock\"\nmetrics = \"off\"\n\
             arena = \"{dir}/arena\"\nbusy_poll_us = 1000000\ncpu = {}\nlog = \"warn\"\n",
            self.back_cpu
        );
        for (port, mac) in MACS.iter().enumerate() {
            text += &format!(
                "\n[[vm]]\nname = \"port{port}\"\nsocket = \"{dir}/{port}.sock\"\nmac = \"{mac}\"\n\
                 allow_unsealed_memory = true\n"
            );
        }
        fs::write(&config, text)?;
        let mut daemon = Command::new("timeout")
            .args(["--signal=KILL", TURN_SECONDS_MAX, env!("CARGO_BIN_EXE_nightporterd")])
            .arg("--config")
            .arg(&config)
            .spawn()?;
        let mpps = self.wait_for_sockets().and_then(|()| self.measure());
        // `timeout` passes TERM on; the daemon drains (there is nothing to drain) and exits.
        Command::new("kill").arg(daemon.id().to_string()).status()?;
        daemon.wait()?;
        mpps
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// A running `dpdk-testpmd` and its command line. It quits when its input closes.
struct Testpmd {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    /// Its output so far, for the error message.
    said: String,
}

impl Testpmd {
    /// `role` keeps the run-time files of two processes apart; `cpu` is the one that forwards.
    fn spawn(
        bench: &Bench,
        role: &str,
        cpu: usize,
        vdevs: &[String],
        options: &[String],
    ) -> Result<Self> {
        let mut child = Command::new("timeout")
            .args([TURN_SECONDS_MAX, "stdbuf", "-oL", "dpdk-testpmd"])
            .env("RUNTIME_DIRECTORY", &bench.dir)
            .arg(format!("--lcores=0@{},1@{cpu}", bench.main_cpu))
            .args(["--no-huge", "-m", "512", "--no-pci"])
            .arg(format!("--file-prefix={role}"))
            .args(vdevs)
            .args(["--", "-i", "--nb-cores=1", "--forward-mode=io", "--total-num-mbufs=20000"])
            .args(options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let input = child.stdin.take().context("no input")?;
        let output = BufReader::new(child.stdout.take().context("no output")?);
        Ok(Self { child, input, output, said: String::new() })
    }

    fn command(&mut self, command: &str) -> Result<()> {
        Ok(writeln!(self.input, "{command}")?)
    }

    /// The next line that contains `text`.
    fn wait_for(&mut self, text: &str) -> Result<String> {
        loop {
            let mut line = String::new();
            if self.output.read_line(&mut line)? == 0 {
                bail!("dpdk-testpmd ended; it said:\n{}", self.said);
            }
            self.said += &line;
            if line.contains(text) {
                return Ok(line);
            }
        }
    }

    /// Frames received per second on both ports since the last call.
    fn rates(&mut self) -> Result<f64> {
        self.command("show port stats all")?;
        let mut sum = 0.0;
        for _ in 0..2 {
            let line = self.wait_for("Rx-pps:")?;
            sum += line.split_whitespace().nth(1).context("no rate")?.parse::<f64>()?;
        }
        Ok(sum)
    }

    fn quit(mut self) -> Result<()> {
        drop(self.input);
        std::io::copy(&mut self.output, &mut std::io::sink())?;
        self.child.wait()?;
        Ok(())
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// All rounds; the object for the result file.
fn run() -> Result<Value> {
    let bench = Bench::new()?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        theirs.push(bench.net_vhost()?);
        ours.push(bench.nightporter()?);
        let (theirs, ours) = (theirs[round - 1], ours[round - 1]);
        println!("round {round}/{ROUNDS}: net_vhost {theirs:.2} Mpps, nightporter {ours:.2} Mpps");
    }
    let (nightporter, net_vhost) = (median(&mut ours), median(&mut theirs));
    println!("\n64-byte frames, median of {ROUNDS} rounds, Mpps");
    println!("  DPDK net_vhost {net_vhost:>8.2}\n  nightporterd   {nightporter:>8.2}");
    println!("  ratio          {:>8.2}   (aim: at least 0.60)", nightporter / net_vhost);
    Ok(json!({ "nightporter_mpps": nightporter, "net_vhost_mpps": net_vhost,
               "nightporter_rounds": ours, "net_vhost_rounds": theirs }))
}

fn main() -> Result<()> {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("bench");
    fs::create_dir_all(&dir)?;
    let file = dir.join("result.json");
    let mut result: Value = match fs::read_to_string(&file) {
        Ok(text) => serde_json::from_str(&text)?,
        Err(_) => json!({}), // the other bench has not run
    };
    result["forwarding"] = if Command::new("dpdk-testpmd").arg("--version").output().is_ok() {
        run()?
    } else {
        println!("SKIPPED: forwarding needs dpdk-testpmd: apt-get install dpdk-dev");
        Value::Null
    };
    fs::write(&file, serde_json::to_string_pretty(&result)? + "\n")?;
    println!("written: {}", file.display());
    Ok(())
}
