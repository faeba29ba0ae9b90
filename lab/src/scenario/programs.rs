//! Unmodified programs of Debian whose connections go over their hosts: between guests of one host,
//! and of two.

mod go;
mod scripts;

use std::net::Ipv4Addr;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use nightporter_guest::control::{Command, Reply};

use crate::hosts::{HOST_OF, Hosts, nic};
use crate::image::{Image, TOE_LAUNCHER, TOE_LIBRARY};
use crate::peer::Sockets::{self, Native, Toe};

/// The packages of guests.
const PACKAGES: [&str; 9] = [
    "coreutils",
    "curl",
    "dash",
    "iperf3",
    "nginx-light",
    "openmpi-bin",
    "openssh-server",
    "python3",
    "redis-server",
];

/// Bytes of the file that programs send, and more than so many have to go by TOE.
const FILE: u64 = 20_000_000;

/// The guest that connects.
const CLIENT: usize = 0;
/// The guests that it connects to: on the same host, and on another.
const SERVERS: [usize; 2] = [1, 2];

/// A program, and its test: the server is this guest.
type Work = fn(&mut Hosts, usize) -> Result<()>;

/// The first are tried by `make test`, all by name.
const PROGRAMS: [(&str, Work); 10] = [
    ("nginx and curl", nginx_and_curl),
    ("python's asyncio", asyncio),
    ("Open MPI", open_mpi),
    ("nginx under the launcher", launched_nginx),
    ("curl under the launcher", launched_curl),
    ("python", python),
    ("iperf3", iperf3),
    ("redis", redis),
    ("ssh", ssh),
    ("a static program of Go under the launcher", static_go),
];
const QUICK: usize = 5;

/// The static program in a guest.
const GO: &str = "/bin/files";

pub(super) fn image(with_sockets: &Image) -> Result<Image> {
    with_sockets.with_packages("programs", &PACKAGES)
}

/// The same with a program that takes long to build.
pub(super) fn image_of_all(with_sockets: &Image) -> Result<Image> {
    image(with_sockets)?.with_program(GO, &go::built()?)
}

/// Some, to another host.
pub(super) fn some(hosts: &mut Hosts) -> Result<()> {
    run(hosts, &SERVERS[1..], &PROGRAMS[..QUICK])
}

/// All, to the same host and to another.
pub(super) fn all(hosts: &mut Hosts) -> Result<()> {
    run(hosts, &SERVERS, &PROGRAMS)
}

fn run(hosts: &mut Hosts, servers: &[usize], programs: &[(&str, Work)]) -> Result<()> {
    for guest in 0..hosts.guests.len() {
        prepare(hosts, guest).context("preparing a guest")?;
    }
    let key = sh(hosts, CLIENT, Native, "cat /srv/key.pub")?;
    for &server in servers {
        write(hosts, server, "/srv/.ssh/authorized_keys", &key)?;
        for (name, work) in programs {
            let begun = Instant::now();
            let at = if HOST_OF[server] == HOST_OF[CLIENT] { "one host" } else { "two hosts" };
            work(hosts, server).with_context(|| format!("{name}, {at}"))?;
            println!("{name}, {at}: {:.1} s", begun.elapsed().as_secs_f64());
        }
    }
    Ok(())
}

/// Files that an installed Debian has, and an unpacked one has not.
fn prepare(hosts: &mut Hosts, guest: usize) -> Result<()> {
    write(hosts, guest, "/proc/sys/kernel/hostname", &format!("guest{guest}"))?;
    for (path, text) in scripts::FILES {
        write(hosts, guest, path, text)?;
    }
    sh(hosts, guest, Native, scripts::PREPARE).map(drop)
}

fn address(guest: usize) -> Ipv4Addr {
    nic(guest).address
}

fn write(hosts: &mut Hosts, guest: usize, path: &str, text: &str) -> Result<()> {
    let (path, text) = (path.to_owned(), text.to_owned());
    match hosts.guests[guest].call(&Command::Write { path, text })? {
        Reply::Ok => Ok(()),
        other => bail!("write was answered with {other:?}"),
    }
}

fn environment(sockets: Sockets) -> Vec<(String, String)> {
    let mut all = sockets.environment(true);
    for (name, value) in [("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"), ("HOME", "/srv")] {
        all.push((name.to_owned(), value.to_owned()));
    }
    all
}

/// Runs a script to its end; returns its output.
fn sh(hosts: &mut Hosts, guest: usize, sockets: Sockets, script: &str) -> Result<String> {
    let arguments = vec!["-ec".to_owned(), script.to_owned()];
    let (program, environment) = ("/bin/sh".to_owned(), environment(sockets));
    match hosts.guests[guest].call(&Command::Run { program, arguments, environment })? {
        Reply::Ran { ok: true, output } => Ok(output),
        Reply::Ran { ok: false, output } => bail!("{script}\nsaid: {output}"),
        other => bail!("run was answered with {other:?}"),
    }
}

/// Starts a script that stays, instead of the earlier server; it is up when this port has a
/// listener.
fn serve(hosts: &mut Hosts, guest: usize, sockets: Sockets, script: &str, port: u16) -> Result<()> {
    let script = format!("exec {script} >/tmp/server.log 2>&1");
    let (name, program) = ("server".to_owned(), "/bin/sh".to_owned());
    let (arguments, environment) = (vec!["-ec".to_owned(), script.clone()], environment(sockets));
    match hosts.guests[guest].call(&Command::Start { name, program, arguments, environment })? {
        Reply::Ok => {}
        other => bail!("start was answered with {other:?}"),
    }
    let awaited = format!("/tmp/listens {port} || {{ cat /tmp/server.log; exit 1; }}");
    sh(hosts, guest, Native, &awaited).with_context(|| script).map(drop)
}

/// Runs a script in the client, at least so many of whose bytes go by TOE to one of both; returns
/// its output.
fn by_toe(hosts: &mut Hosts, server: usize, least: u64, script: &str) -> Result<String> {
    by_toe_as(hosts, server, Toe, least, script)
}

fn by_toe_as(
    hosts: &mut Hosts,
    server: usize,
    sockets: Sockets,
    least: u64,
    script: &str,
) -> Result<String> {
    let given =
        |hosts: &mut Hosts| Ok::<_, anyhow::Error>(hosts.given(CLIENT)? + hosts.given(server)?);
    let before = given(hosts)?;
    let said = sh(hosts, CLIENT, sockets, script)?;
    let went = given(hosts)? - before;
    ensure!(went >= least, "{went} bytes went by TOE, not {least}:\n{script}\nsaid: {said}");
    Ok(said)
}

/// Whether the client's `/tmp/got` is the server's `/tmp/file`.
fn is_whole(hosts: &mut Hosts, server: usize) -> Result<()> {
    let sent = sh(hosts, server, Native, "sha256sum < /tmp/file")?;
    let got = sh(hosts, CLIENT, Native, "sha256sum < /tmp/got; rm /tmp/got")?;
    ensure!(sent == got, "{got} came of {sent}");
    Ok(())
}

fn nginx_and_curl(hosts: &mut Hosts, server: usize) -> Result<()> {
    serve(hosts, server, Toe, "nginx -c /tmp/nginx.conf", 80)?;
    fetched(hosts, server, Toe, "")?;
    // One connection for many, and many at once.
    let url = format!("http://{}/small", address(server));
    let urls = [&*url; 50].join(" -o /dev/null ");
    by_toe(hosts, server, 50 * 1000, &format!("curl -fsS -o /dev/null {urls}"))?;
    let parallel = format!("curl -fsS --parallel --parallel-max 20 -o /dev/null {urls}");
    by_toe(hosts, server, 50 * 1000, &parallel)?;
    // A client without TOE is served by the same listener.
    let native = format!("curl -fsS -o /tmp/got http://{}/file", address(server));
    sh(hosts, CLIENT, Native, &native)?;
    is_whole(hosts, server)
}

/// curl gets the file from a web server.
fn fetched(hosts: &mut Hosts, server: usize, sockets: Sockets, launcher: &str) -> Result<()> {
    let script = format!("{launcher} curl -fsS -o /tmp/got http://{}/file", address(server));
    let said = by_toe_as(hosts, server, sockets, FILE, &script)?;
    let logged = format!("connect {}:80: by TOE", address(server));
    ensure!(sockets == Native || said.contains(&logged), "the library said {said:?}");
    is_whole(hosts, server)
}

fn launched_curl(hosts: &mut Hosts, server: usize) -> Result<()> {
    serve(hosts, server, Toe, "nginx -c /tmp/nginx.conf", 80)?;
    fetched(hosts, server, Native, &format!("{TOE_LAUNCHER} run --"))
}

fn launched_nginx(hosts: &mut Hosts, server: usize) -> Result<()> {
    let launched = format!("{TOE_LAUNCHER} run -- nginx -c /tmp/nginx.conf");
    serve(hosts, server, Native, &launched, 80)?;
    fetched(hosts, server, Toe, "")
}

fn static_go(hosts: &mut Hosts, server: usize) -> Result<()> {
    let launched = format!("{TOE_LAUNCHER} run -- {GO}");
    serve(hosts, server, Native, &format!("{launched} serve"), 8003)?;
    let sent = sh(hosts, server, Native, "sha256sum < /tmp/file")?;
    let script = format!("{launched} {}", address(server));
    let got = by_toe_as(hosts, server, Native, FILE, &script)?;
    ensure!(sent == got, "{got} came of {sent}");
    Ok(())
}

fn python(hosts: &mut Hosts, server: usize) -> Result<()> {
    serve(hosts, server, Toe, "python3 /tmp/blocking.py serve", 8001)?;
    let script = format!("python3 /tmp/blocking.py {}", address(server));
    whole_both_ways(hosts, server, &script)
}

fn asyncio(hosts: &mut Hosts, server: usize) -> Result<()> {
    serve(hosts, server, Toe, "python3 /tmp/streams.py serve", 8002)?;
    let script = format!("python3 /tmp/streams.py {}", address(server));
    whole_both_ways(hosts, server, &script)
}

/// The script compares hashes itself.
fn whole_both_ways(hosts: &mut Hosts, server: usize, script: &str) -> Result<()> {
    let said = by_toe(hosts, server, 2 * scripts::ECHOED, script)?;
    ensure!(said.lines().any(|line| line == "whole"), "it said {said}");
    Ok(())
}

fn iperf3(hosts: &mut Hosts, server: usize) -> Result<()> {
    serve(hosts, server, Toe, "iperf3 -s", 5201)?;
    for way in ["", "-R", "--bidir -P 3"] {
        let script = format!("iperf3 -c {} -n {FILE} {way}", address(server));
        by_toe(hosts, server, FILE, &script)?;
    }
    Ok(())
}

fn redis(hosts: &mut Hosts, server: usize) -> Result<()> {
    serve(hosts, server, Toe, "redis-server /tmp/redis.conf", 6379)?;
    let cli = format!("redis-cli -h {}", address(server));
    // Its client reads 1 KiB at a time.
    let bytes = FILE / 10;
    let script = format!(
        "head -c {bytes} /tmp/file > /tmp/sent
        {cli} -x SET file < /tmp/sent
        {cli} --raw GET file | head -c {bytes} | sha256sum > /tmp/there
        test \"$(sha256sum < /tmp/sent)\" = \"$(cat /tmp/there)\""
    );
    by_toe(hosts, server, 2 * bytes, &script)?;
    let many = format!("redis-benchmark -q -h {} -t set,get -n 2000 -c 20 -d 100", address(server));
    by_toe(hosts, server, 2 * 2000 * 100, &many).map(drop)
}

fn ssh(hosts: &mut Hosts, server: usize) -> Result<()> {
    serve(hosts, server, Toe, "/usr/sbin/sshd -D -e -f /tmp/sshd_config", 22)?;
    let (options, to) = (scripts::SSH, address(server));
    let script = format!(
        "ssh {options} root@{to} 'cat > /tmp/got; sha256sum < /tmp/got' < /tmp/file > /tmp/there
        test \"$(sha256sum < /tmp/file)\" = \"$(cat /tmp/there)\"
        ssh {options} root@{to} 'cat /tmp/file' > /tmp/got"
    );
    by_toe(hosts, server, 2 * FILE, &script)?;
    is_whole(hosts, server)
}

/// mpirun reaches the other guest by ssh; its processes reach each other by TOE.
fn open_mpi(hosts: &mut Hosts, server: usize) -> Result<()> {
    serve(hosts, server, Native, "/usr/sbin/sshd -D -e -f /tmp/sshd_config", 22)?;
    let (options, own, to) = (scripts::SSH, address(CLIENT), address(server));
    let script = format!(
        "mpirun.openmpi --allow-run-as-root -np 2 --host {own},{to} --mca plm_rsh_args '{options}' \
         --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include {own}/24 \
         --mca oob_tcp_if_include {own}/24 -x LD_PRELOAD={TOE_LIBRARY} python3 /tmp/mpi.py"
    );
    let said = by_toe_as(hosts, server, Native, 2 * scripts::ECHOED, &script)?;
    let whole = said.lines().filter(|line| *line == "whole").count();
    ensure!(whole == 2, "the two said {said}");
    Ok(())
}
