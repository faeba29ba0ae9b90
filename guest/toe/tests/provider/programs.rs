//! Programs that people run, client and server under the library. Those that are not installed are
//! left out, and the output says so.

use std::env;
use std::fs;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use crate::{GUEST, NATIVE, World, lines};

/// A server, until the test ends.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // With all that it has started.
        let _ = killpg(Pid::from_raw(self.0.id().cast_signed()), Signal::SIGKILL);
        let _ = self.0.wait();
    }
}

/// Says so where tests that pass are not silent.
fn left_out(why: &str) {
    let _ = writeln!(std::io::stderr(), "LEFT OUT: {why}");
}

pub(crate) fn is_installed(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&path).any(|dir| dir.join(program).exists());
    if !found {
        left_out(&format!("{program} is not installed"));
    }
    found
}

impl World {
    /// Starts a server, and waits until it listens.
    fn serves(&self, port: u16, program: &str, words: &str) -> Server {
        let words = words.replace("PORT", &port.to_string()).replace("IP", &GUEST.to_string());
        let mut server = self.under(program);
        server.current_dir(&self.directory).args(words.split_whitespace());
        let server = server.process_group(0).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let server = Server(server.expect("it starts"));
        self.host.wait_for_listener(port);
        server
    }

    /// Runs a client, and says what it prints and how many connections it made by TOE.
    fn runs(&self, mut client: Command) -> (Vec<String>, usize) {
        let before = self.host.state().connections;
        let output = client.current_dir(&self.directory).output().expect("it ran");
        (lines(&output), self.host.state().connections - before)
    }

    /// A file of 5 MB, and its checksum.
    fn file(&self) -> String {
        let bytes: Vec<u8> = (0..5_000_000_u32).map(|i| (i % 251).to_le_bytes()[0]).collect();
        fs::write(self.directory.join("file"), bytes).expect("written");
        self.checksum("file")
    }

    fn checksum(&self, name: &str) -> String {
        let mut sum = Command::new("sha256sum");
        sum.arg(name);
        let line = self.runs(sum).0.remove(0);
        line.split(' ').next().expect("a checksum").to_string()
    }

    /// curl gets the file from there, several times over one connection.
    fn curl(&self, port: u16, checksum: &str) {
        if !is_installed("curl") {
            return;
        }
        let mut curl = self.under("curl");
        curl.args(["--silent", "--fail", "--show-error", "-o", "got"]);
        curl.arg(format!("http://{GUEST}:{port}/file"));
        let (_, connections) = self.runs(curl);
        assert_eq!(connections, 1);
        assert_eq!(self.checksum("got"), checksum);
    }
}

#[test]
fn python_serves_what_curl_gets() {
    if !is_installed("python3") {
        return;
    }
    let world = World::new();
    let checksum = world.file();
    let _server = world.serves(8001, "python3", "-m http.server PORT --bind IP");
    world.curl(8001, &checksum);
}

#[test]
fn asyncio_talks_to_itself() {
    if !is_installed("python3") {
        return;
    }
    let world = World::new();
    let script = "
import asyncio, hashlib, sys

async def echo(reader, writer):
    while data := await reader.read(70001):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
    writer.close()

async def client(i, to):
    reader, writer = await asyncio.open_connection(*to)
    sent = bytes(range(i, i + 100)) * 3000
    writer.write(sent)
    writer.write_eof()
    got = await reader.read()
    assert writer.get_extra_info('peername') == to, writer.get_extra_info('peername')
    writer.close()
    await writer.wait_closed()
    return got == sent

async def main():
    server = await asyncio.start_server(echo, sys.argv[1], 8002)
    to = server.sockets[0].getsockname()
    print(sum(await asyncio.gather(*[client(i, to) for i in range(50)])))
    try:
        await asyncio.open_connection(sys.argv[1], 8003)
    except ConnectionRefusedError:
        print('refused')
    server.close()

asyncio.run(main())
";
    let mut python = world.under("python3");
    python.args(["-c", script, &GUEST.to_string()]);
    let (printed, connections) = world.runs(python);
    assert_eq!((printed, connections), (vec!["50".to_string(), "refused".to_string()], 50));
}

#[test]
fn nginx_serves_from_several_processes() {
    if !is_installed("nginx") {
        return;
    }
    let world = World::new();
    let checksum = world.file();
    let directory = world.directory.display().to_string();
    let settings = format!(
        "daemon off; worker_processes 2; pid {directory}/pid; error_log {directory}/errors; \
         events {{ worker_connections 64; }} \
         http {{ access_log off; sendfile on; tcp_nopush on; \
         client_body_temp_path {directory}; proxy_temp_path {directory}; \
         fastcgi_temp_path {directory}; uwsgi_temp_path {directory}; scgi_temp_path {directory}; \
         server {{ listen {GUEST}:8004; root {directory}; }} \
         server {{ listen {GUEST}:8005; location / {{ proxy_pass http://{GUEST}:8004; }} }} }} \
         user root;"
    );
    fs::write(world.directory.join("settings"), settings).expect("written");
    let words = format!("-c {directory}/settings -p {directory}");
    let _server = world.serves(8005, "nginx", &words);
    for _ in 0..5 {
        world.curl(8004, &checksum);
    }
    // The proxy is a client, too, and connects without blocking.
    let mut curl = world.under("curl");
    curl.args(["--silent", "--fail", "-o", "got", &format!("http://{GUEST}:8005/file")]);
    let (_, connections) = world.runs(curl);
    assert_eq!(connections, 2);
    assert_eq!(world.checksum("got"), checksum);
}

#[test]
fn redis_answers_its_benchmark() {
    if !is_installed("redis-server") || !is_installed("redis-benchmark") {
        return;
    }
    let world = World::new();
    let words = "--port PORT --bind IP --protected-mode no --save  --appendonly no";
    let _server = world.serves(8006, "redis-server", words);
    let mut benchmark = world.under("redis-benchmark");
    benchmark.args(["-h", &GUEST.to_string(), "-p", "8006", "-n", "5000", "-c", "20", "-q"]);
    benchmark.args(["-t", "set,get,lpush,lrange_100", "-d", "500"]);
    let (printed, connections) = world.runs(benchmark);
    assert!(printed.iter().any(|line| line.contains("requests per second")), "{printed:?}");
    assert!(connections >= 80, "{connections} connections");
}

#[test]
fn iperf3_measures_both_directions() {
    if !is_installed("iperf3") {
        return;
    }
    let world = World::new();
    let _server = world.serves(8007, "iperf3", "--server --bind IP --port PORT");
    for direction in [&[][..], &["--reverse"], &["--bidir"]] {
        let mut client = world.under("iperf3");
        client.args(["--client", &GUEST.to_string(), "--port", "8007", "--bytes", "30M"]);
        client.args(["--parallel", "2"]).args(direction);
        let (printed, connections) = world.runs(client);
        assert!(printed.iter().any(|line| line.contains("receiver")), "{printed:?}");
        assert!(connections >= 3, "{connections} connections");
    }
}

#[test]
fn ssh_gives_its_connections_to_other_programs() {
    if !is_installed("sshd") || !is_installed("ssh") || !is_installed("ssh-keygen") {
        return;
    }
    if !fs::read_to_string("/etc/passwd").is_ok_and(|users| users.contains("sshd:")) {
        left_out("sshd has no user");
        return;
    }
    let world = World::new();
    let checksum = world.file();
    let directory = world.directory.display().to_string();
    for name in ["host", "user"] {
        let mut keygen = Command::new("ssh-keygen");
        keygen.args(["-q", "-t", "ed25519", "-N", "", "-f", &format!("{directory}/{name}")]);
        world.runs(keygen);
    }
    let settings = format!(
        "HostKey {directory}/host\nAuthorizedKeysFile {directory}/user.pub\nStrictModes no\n\
         PermitRootLogin yes\nUsePAM no\nPidFile none\nListenAddress {GUEST}\n"
    );
    fs::write(world.directory.join("settings"), settings).expect("written");
    // It wants to be called by its whole path, since it calls itself.
    let path = env::var_os("PATH").unwrap_or_default();
    let sshd = env::split_paths(&path).map(|dir| dir.join("sshd")).find(|sshd| sshd.exists());
    let sshd = sshd.expect("it is there").display().to_string();
    let words = format!("-D -p PORT -f {directory}/settings");
    let _server = world.serves(8008, &sshd, &words);
    let mut ssh = world.under("ssh");
    ssh.args(["-p", "8008", "-i", &format!("{directory}/user"), "-o", "StrictHostKeyChecking=no"]);
    ssh.args(["-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]);
    ssh.args([&format!("root@{GUEST}"), &format!("echo $SSH_CONNECTION; cat > {directory}/got")]);
    ssh.stdin(fs::File::open(world.directory.join("file")).expect("a file"));
    let (printed, connections) = world.runs(ssh);
    assert_eq!(connections, 1);
    assert!(printed[0].starts_with(&GUEST.to_string()), "{printed:?}");
    assert_eq!(world.checksum("got"), checksum);
}

#[test]
fn the_launcher_runs_what_no_library_can_be_put_under() {
    if !is_installed("python3") || !is_installed("curl") {
        return;
    }
    let world = World::new();
    let checksum = world.file();
    let _server = world.serves(8010, "python3", "-m http.server PORT --bind IP");
    let address = format!("http://{GUEST}:8010/file");
    let mut curl = world.launched("curl");
    curl.args(["--silent", "--fail", "-o", "got", &address]);
    assert_eq!(world.runs(curl).1, 1);
    assert_eq!(world.checksum("got"), checksum);
    if !is_installed("go") {
        return;
    }
    let source = r#"package main
import ("io"; "net/http"; "os")
func main() {
    if os.Args[1] == "serve" {
        panic(http.ListenAndServe(os.Args[2], http.FileServer(http.Dir("."))))
    }
    answer, err := http.Get(os.Args[1])
    if err != nil { panic(err) }
    file, err := os.Create("go")
    if err != nil { panic(err) }
    if _, err := io.Copy(file, answer.Body); err != nil { panic(err) }
    if _, err := http.Get(os.Args[2]); err == nil { panic("nobody listens there") }
}"#;
    fs::write(world.directory.join("get.go"), source).expect("written");
    let mut build = Command::new("go");
    build.env("CGO_ENABLED", "0").args(["build", "-o", "get", "get.go"]);
    world.runs(build);
    let mut get = world.launched("./get");
    get.args([&address, &format!("http://{GUEST}:8011/")]);
    assert_eq!(world.runs(get).1, 1);
    assert_eq!(world.checksum("go"), checksum);
    let mut serve = world.launched("./get");
    serve.args(["serve", &format!("{GUEST}:8012")]).current_dir(&world.directory);
    // Or its listener is one of MPTCP (Go 1.24), which stays native.
    serve.env("GODEBUG", "multipathtcp=0");
    let _server = Server(serve.process_group(0).spawn().expect("it starts"));
    world.host.wait_for_listener(8012);
    for _ in 0..20 {
        world.curl(8012, &checksum);
    }
}

#[test]
fn a_destination_without_a_toe_is_reached_by_tcp() {
    if !is_installed("python3") || !is_installed("curl") {
        return;
    }
    let world = World::new();
    let checksum = world.file();
    let words = format!("-m http.server 8009 --bind {NATIVE}");
    // That listener is not the guest's: the host would not find it.
    let _server = world.serves(8009, "python3", &words);
    let mut curl = world.under("curl");
    curl.args(["--silent", "--fail", "-o", "got", &format!("http://{NATIVE}:8009/file")]);
    assert_eq!(world.runs(curl).1, 0);
    assert_eq!(world.checksum("got"), checksum);
}
