//! The errors of `nightporter`, as an operator reads them.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::thread;

fn nightporter(control: &str, arguments: &[&str]) -> Output {
    let tool = Command::new(env!("CARGO_BIN_EXE_nightporter"))
        .args(["--control", control])
        .args(arguments)
        .output();
    tool.unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// A daemon that gives one answer to one request; the path of its socket.
fn answering(name: &str, answer: &'static str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("np-cli-{}-{name}", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut stream = BufReader::new(stream);
        stream.read_line(&mut String::new()).unwrap();
        stream.get_mut().write_all(answer.as_bytes()).unwrap();
    });
    path
}

#[test]
fn without_a_daemon_it_says_so_and_how_to_start_one() {
    let output = nightporter("/nowhere/control", &["status"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        stderr(&output),
        "nightporter: nightporterd is not running: nobody listens at /nowhere/control\n    \
         fix: start it (nightporterd --config FILE), or give its daemon.control with \
         --control PATH\n"
    );
}

#[test]
fn the_daemons_errors_are_shown_with_their_fix() {
    let answer = "{\"error\":{\"what\":\"there is no VM \\\"x\\\"\",\"fix\":\"use one of: a\"}}\n";
    let socket = answering("error", answer);
    let output = nightporter(socket.to_str().unwrap(), &["offload", "on", "x"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stderr(&output), "nightporter: there is no VM \"x\"\n    fix: use one of: a\n");
    std::fs::remove_file(socket).unwrap();
}

#[test]
fn a_daemon_that_dies_or_speaks_otherwise_is_an_error() {
    for (name, answer, said) in [
        ("dead", "", "the daemon has gone"),
        ("other", "{\"welcome\":1}\n", "not an answer of this version's daemon"),
    ] {
        let socket = answering(name, answer);
        let output = nightporter(socket.to_str().unwrap(), &["status"]);
        assert!(stderr(&output).contains(said), "{}", stderr(&output));
        assert_eq!(output.status.code(), Some(1));
        std::fs::remove_file(socket).unwrap();
    }
}

#[test]
fn a_daemon_that_stands_is_an_error_after_five_seconds() {
    let path = std::env::temp_dir().join(format!("np-cli-{}-stands", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    let output = nightporter(path.to_str().unwrap(), &["status"]);
    assert_eq!(output.status.code(), Some(1));
    let said = stderr(&output);
    assert!(said.starts_with("nightporter: no answer for 5 s: nightporterd hangs\n"), "{said}");
    drop(listener);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_capture_says_what_it_misses() {
    let path = std::env::temp_dir().join(format!("np-cli-{}-capture", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    let daemon = thread::spawn(move || {
        let accept = || BufReader::new(listener.accept().unwrap().0);
        let (mut capture, mut asked) = (accept(), String::new());
        capture.read_line(&mut asked).unwrap();
        capture.get_mut().write_all(b"{\"stream\":{}}\nframes").unwrap();
        let mut status = accept();
        // When the tool asks again, it has reported the answer before.
        for missed in [0, 7, 7] {
            status.read_line(&mut String::new()).unwrap();
            let port = nightporter_api::PortStatus {
                name: "lan".into(),
                captures_missed: missed,
                ..nightporter_api::PortStatus::default()
            };
            let all =
                nightporter_api::Status { ports: vec![port], ..nightporter_api::Status::default() };
            let mut line =
                serde_json::to_vec(&nightporter_api::Reply::Status(Box::new(all))).unwrap();
            line.push(b'\n');
            status.get_mut().write_all(&line).unwrap();
        }
        asked
    });
    let arguments =
        ["capture", "lan", "-w", "-", "-s", "96", "--host", "192.0.2.1", "--port", "80"];
    let output = nightporter(path.to_str().unwrap(), &arguments);
    std::fs::remove_file(path).unwrap();
    assert_eq!(output.stdout, b"frames");
    let asked = "{\"cmd\":\"capture\",\"port\":\"lan\",\"snap_bytes\":96,\
                 \"only\":{\"host\":\"192.0.2.1\",\"port\":80}}\n";
    assert_eq!(daemon.join().unwrap(), asked);
    let said = stderr(&output);
    assert_eq!(said.matches("captures of lan have missed 7 frames").count(), 1, "{said}");
}

#[test]
fn done_is_silent_and_json_is_the_daemons() {
    let socket = answering("done", "{\"done\":{}}\n");
    let output = nightporter(socket.to_str().unwrap(), &["offload", "off", "a"]);
    assert!(output.status.success() && output.stdout.is_empty() && output.stderr.is_empty());
    std::fs::remove_file(socket).unwrap();
    let socket = answering("json", "{\"flows\":{\"flows\":[],\"next\":null}}\n");
    let output = nightporter(socket.to_str().unwrap(), &["--json", "flows"]);
    assert_eq!(output.stdout, b"[]\n");
    std::fs::remove_file(socket).unwrap();
}

#[test]
fn a_plan_is_shown_line_by_line_and_what_stays_undone_is_said() {
    let said = |name: &str, answer: &'static str, arguments: &[&str]| {
        let socket = answering(name, answer);
        let output = nightporter(socket.to_str().unwrap(), arguments);
        std::fs::remove_file(socket).unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let done = "{\"plan\":{\"steps\":[\"+ vm c\"],\"needs_restart\":[],\"done\":true}}\n";
    assert_eq!(said("add", done, &["vm", "add", "c", "mtu=9000"]), "+ vm c\n");
    let nothing = "{\"plan\":{\"steps\":[],\"needs_restart\":[],\"done\":true}}\n";
    assert_eq!(said("same", nothing, &["reload"]), "nothing to change\n");
    let dry = "{\"plan\":{\"steps\":[\"- vm c\"],\
               \"needs_restart\":[\"daemon.cpu 1 -> 2\"],\"done\":false}}\n";
    assert_eq!(
        said("dry", dry, &["reload", "--dry-run"]),
        "- vm c\n! waits for a restart: daemon.cpu 1 -> 2\n\
         nothing was changed: these changes would be made\n"
    );
    let part =
        "{\"plan\":{\"steps\":[],\"needs_restart\":[\"daemon.cpu 1 -> 2\"],\"done\":true}}\n";
    assert_eq!(said("part", part, &["reload"]), "! waits for a restart: daemon.cpu 1 -> 2\n");
}

#[test]
fn a_vm_that_is_saved_stays_in_its_file_if_no_answer_says_that_it_is_not_read() {
    let section =
        "{\"plan\":{\"steps\":[],\"needs_restart\":[],\"section\":\"[[vm]]\",\"done\":false}}\n";
    let refused = "{\"error\":{\"what\":\"no\",\"fix\":\"wait\"}}\n";
    for (name, answer, stays) in [("lost", "", true), ("refused", refused, false)] {
        let dir = std::env::temp_dir().join(format!("np-cli-{}-save-{name}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (path, save) = (dir.join("socket"), format!("--save={}", dir.display()));
        let listener = UnixListener::bind(&path).unwrap();
        let daemon = thread::spawn(move || {
            let mut stream = BufReader::new(listener.accept().unwrap().0);
            let mut asked = String::new();
            for answer in [section, answer] {
                stream.read_line(&mut asked).unwrap();
                stream.get_mut().write_all(answer.as_bytes()).unwrap();
            }
            asked
        });
        let output = nightporter(path.to_str().unwrap(), &["attach", "vnet0", "mtu=9000", &save]);
        assert_eq!(dir.join("vnet0.toml").exists(), stays, "{}", stderr(&output));
        assert_eq!(stderr(&output).contains("vnet0.toml stays, and may have been read"), stays);
        let asked = daemon.join().unwrap();
        let add = "\"name\":\"vnet0\",\"keys\":{\"mtu\":\"9000\",\"tap\":\"vnet0\"}";
        assert!(asked.contains(add), "{asked}");
        std::fs::remove_dir_all(dir).unwrap();
    }
}

#[test]
fn a_tap_is_detached_by_the_name_of_its_vm() {
    let path = std::env::temp_dir().join(format!("np-cli-{}-detach", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    let mut port = nightporter_api::PortStatus { name: "web1".into(), ..Default::default() };
    port.keys.insert("tap".into(), "\"vnet0\"".into());
    let status = nightporter_api::Status { ports: vec![port], ..Default::default() };
    let status =
        serde_json::to_string(&nightporter_api::Reply::Status(Box::new(status))).unwrap() + "\n";
    let daemon = thread::spawn(move || {
        let plan = "{\"plan\":{\"steps\":[\"- vm web1\"],\"needs_restart\":[],\"done\":true}}\n";
        let mut asked = Vec::new();
        for answer in [&*status, &*status, plan] {
            let mut stream = BufReader::new(listener.accept().unwrap().0);
            asked.push(String::new());
            stream.read_line(asked.last_mut().unwrap()).unwrap();
            stream.get_mut().write_all(answer.as_bytes()).unwrap();
        }
        asked.pop()
    });
    let path = path.to_str().unwrap();
    let said = stderr(&nightporter(path, &["detach", "web1"]));
    let expected = "nightporter: web1 is not attached\n    fix: name a tap that is: vnet0\n";
    assert_eq!(said, expected);
    let output = nightporter(path, &["detach", "vnet0", "--drain", "1min"]);
    assert_eq!(output.stdout, b"- vm web1\n");
    let change = "{\"what\":\"remove_vm\",\"name\":\"web1\",\"drain_ms\":60000}";
    assert!(daemon.join().unwrap().unwrap().contains(change));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_key_without_a_value_is_told_how_to_be_written() {
    let output = nightporter("/nowhere/control", &["vm", "set", "a", "mtu"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("write KEY=VALUE, as in mtu=9000"), "{}", stderr(&output));
}

#[test]
fn a_vm_goes_with_its_own_file_which_stays_as_long_as_the_vm() {
    let dir = std::env::temp_dir().join(format!("np-cli-{}-conf.d", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (file, save) = (dir.join("b.toml"), format!("--save={}", dir.display()));
    let run = |name: &str, answer: &'static str, arguments: &[&str]| {
        let socket = answering(name, answer);
        let all: Vec<_> = arguments.iter().copied().chain([save.as_str()]).collect();
        let output = nightporter(socket.to_str().unwrap(), &all);
        std::fs::remove_file(socket).unwrap();
        (output.status.success(), stderr(&output))
    };
    let done = "{\"plan\":{\"steps\":[\"- vm b\"],\"needs_restart\":[],\"done\":true}}\n";
    let refused = "{\"error\":{\"what\":\"no\",\"fix\":\"wait\"}}\n";
    let remove = ["vm", "remove", "b"];
    let (fine, said) = run("no-file", done, &remove);
    assert!(!fine && said.contains("cannot read") && said.contains("leave out --save"), "{said}");
    let own = "# web\n[[vm]]\nname = \"b\"\n";
    let others = [
        own.replace("\"b\"", "\"c\""),
        format!("{own}[[vm]]\nname = \"c\"\n"),
        format!("{own}  [[vm]]\n  name = \"c\"\n"),
        format!("station = [{{ network = \"n\" }}]\n{own}"),
        format!("toe_rule = [{{ native = true }}]\n{own}"),
    ];
    for other in others {
        std::fs::write(&file, &other).unwrap();
        let (fine, said) = run("other", done, &remove);
        assert!(!fine && said.contains("has more than VM b, or another\n    fix: "), "{said}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), other);
    }
    std::fs::write(&file, own).unwrap();
    assert_eq!(
        run("refused", refused, &remove),
        (false, "nightporter: no\n    fix: wait\n".into())
    );
    assert_eq!(std::fs::read_to_string(&file).unwrap(), own, "the VM is there, and its file");
    let (fine, said) = run("lost", "", &remove);
    assert!(!fine && said.contains("b.toml stays, and the VM may be removed"), "{said}");
    assert!(file.exists());
    assert_eq!(run("gone", done, &remove), (true, String::new()));
    assert!(!file.exists());
    // One that cannot be removed, once the daemon was asked.
    std::fs::write(&file, own).unwrap();
    let path = dir.join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let output = thread::scope(|threads| {
        threads.spawn(|| {
            let mut stream = BufReader::new(listener.accept().unwrap().0);
            stream.read_line(&mut String::new()).unwrap();
            std::fs::remove_file(&file).unwrap();
            std::fs::create_dir(&file).unwrap();
            stream.get_mut().write_all(done.as_bytes()).unwrap();
        });
        nightporter(path.to_str().unwrap(), &["vm", "remove", "b", &save])
    });
    let said = stderr(&output);
    assert!(!output.status.success() && said.contains("the VM is removed, and its file"), "{said}");
    std::fs::remove_dir(&file).unwrap();
    std::fs::remove_file(path).unwrap();
    // One that another file has.
    let there = "{\"plan\":{\"steps\":[],\"needs_restart\":[],\"done\":false}}\n";
    let (fine, said) = run("there", there, &["vm", "add", "b"]);
    assert!(fine && said.starts_with("b is in a configuration file already"), "{said}");
    assert!(!file.exists());
    std::fs::remove_dir(dir).unwrap();
}

#[test]
fn wrong_arguments_are_named_before_a_daemon_is_asked() {
    for (line, said) in [
        ("stauts", "similar subcommands exist: 'stations', 'status'"),
        ("status --watch", "unexpected argument '--watch'"),
        ("flows web1", "unexpected argument 'web1'"),
        ("flows --sort size", "possible values: held, early, idle"),
        ("flow", "<ID>"),
        ("flow abc", "invalid value 'abc' for '<ID>'"),
        ("capture web1", "-w <FILE>"),
        ("capture web1 -w x --port 99999", "99999 is not in 0..=65535"),
        ("capture web1 -w x --host example", "invalid IP address"),
        ("monitor web1 --for never", "write 5s, 500ms or 2min"),
        ("advise --for 0s", "write 5s, 500ms or 2min"),
        ("analyze", "<FILE>..."),
        ("offload web1", "<on|off>"),
        ("rate-limit web1 100", "<MBIT_S|off>"),
        ("vm show", "<NAME>"),
        ("vm set web1", "<KEY=VALUE>..."),
        ("vm remove web1 --save --dry-run", "cannot be used with '--dry-run'"),
        ("attach", "<TAP>"),
        ("detach vnet0 --drain soon", "write 5s, 500ms or 2min"),
        ("uplink add lan", "<KEY=VALUE>..."),
        ("reload now", "unexpected argument 'now'"),
    ] {
        let output = nightporter("/nowhere/control", &line.split(' ').collect::<Vec<_>>());
        assert_eq!(output.status.code(), Some(2), "{line}");
        assert!(stderr(&output).contains(said), "{line}: {}", stderr(&output));
    }
    for (line, said, fix) in [
        ("offload web1 maybe", "maybe is neither on nor off", "write web1 on"),
        ("rate-limit web1 from-guest 0", "0 is no limit", "1 to 100000, or off"),
        ("rate-limit web1 sideways 100", "sideways is no direction", "or to-guest"),
        ("vm set web1 mtu=1 mtu=2", "mtu is given twice", "give it once"),
        ("vm add web3 --save", "--control names another daemon", "--save=DIR/conf.d"),
        ("analyze /nowhere/x.pcap", "cannot read /nowhere/x.pcap", "that you may read"),
        ("analyze /etc/passwd", "/etc/passwd is neither pcap nor pcapng", "tcpdump -w"),
        ("top", "top needs a terminal", "vm list --watch"),
    ] {
        // Some connect first, and say nothing of a change.
        let socket = answering("unasked", "");
        let output = nightporter(socket.to_str().unwrap(), &line.split(' ').collect::<Vec<_>>());
        std::fs::remove_file(socket).unwrap();
        assert_eq!(output.status.code(), Some(1), "{line}");
        let stderr = stderr(&output);
        assert!(stderr.contains(said) && stderr.contains(fix), "{line}: {stderr}");
    }
}
