use clap::Parser as _;

use super::*;
use crate::cli::{Cli, Command};

fn config(args: &[&str]) -> Result<RunConfig, ConfigError> {
    let all = ["wonton", "run", "--kernel", "k"].iter().chain(args);
    let Command::Run(args) = Cli::try_parse_from(all).unwrap().command else {
        panic!("not run");
    };
    args.try_into()
}

#[test]
fn defaults() {
    let config = config(&[]).unwrap();
    assert_eq!(config.cmdline, DEFAULT_CMDLINE);
    assert_eq!((config.cpus, config.memory), (1, 512 << 20));
    let net = config.net.unwrap();
    assert_eq!(net.kind, NetKind::User(UserOptions::default()));
    assert_eq!((net.mac, net.mtu), (DEFAULT_MAC, 1500));
    assert!(config.escape);
}

#[test]
fn transports() {
    let transport = |args: &[&str]| config(args).map(|config| config.transport);
    assert_eq!(transport(&[]), Ok(Transport::Pci));
    assert_eq!(transport(&["--transport", "mmio"]), Ok(Transport::Mmio));
    let error = transport(&["--transport", "isa"]).unwrap_err();
    assert_eq!(error, ConfigError::Transport("isa".to_owned()));
    assert!(error.hint().is_some());
}

#[test]
fn user_text_is_appended() {
    let config = config(&["--cmdline", " quiet  x=1 "]).unwrap();
    assert_eq!(config.cmdline, format!("{DEFAULT_CMDLINE} quiet  x=1"));
    assert_eq!(full_cmdline("a\nb"), Err(ConfigError::Cmdline(b'\n')));
}

#[test]
fn sizes() {
    for (text, size) in [
        ("512M", 512 << 20),
        ("1G", 1 << 30),
        ("2GiB", 2 << 30),
        ("65536k", 64 << 20),
    ] {
        assert_eq!(parse_memory(text), Ok(size), "{text}");
    }
    assert_eq!(parse_memory("17M"), Ok(18 << 20));
    for text in [
        "",
        "M",
        "512",
        "-1G",
        "+1G",
        "1T",
        "1.5G",
        "99999999999999999999G",
        "MM",
        "é",
    ] {
        assert_eq!(
            parse_memory(text),
            Err(ConfigError::MemorySize(text.to_owned())),
            "{text}"
        );
    }
    for text in ["1M", "0G", "1000G", "18446744073709551615G"] {
        assert_eq!(
            parse_memory(text),
            Err(ConfigError::MemoryRange(text.to_owned())),
            "{text}"
        );
    }
}

#[test]
fn cpus() {
    assert_eq!(parse_cpus("254"), Ok(254));
    for text in ["0", "255", "-1", "two", ""] {
        assert!(parse_cpus(text).is_err(), "{text}");
    }
}

#[test]
fn net_specs() {
    assert_eq!(parse_net("none"), Ok(None));
    assert_eq!(parse_net("null").unwrap().unwrap().kind, NetKind::Null);
    let net =
        parse_net("user,rx=copy,host-loopback=allow,mtu=65520,mac=02:00:00:00:00:0A").unwrap();
    let net = net.unwrap();
    assert_eq!((net.mtu, net.mac[5]), (65520, 10));
    let NetKind::User(user) = net.kind else {
        panic!("not user")
    };
    assert_eq!((user.rx, user.host_loopback), (RxPath::Copy, true));
}

#[test]
fn net_errors_name_the_culprit() {
    let table = [
        ("usr", "--net: unknown kind `usr`"),
        ("", "--net: unknown kind ``"),
        ("null,rx=ring", "--net: `null` has no option `rx`"),
        ("none,mtu=1500", "--net: `none` has no option `mtu`"),
        ("user,speed=1", "--net: `user` has no option `speed`"),
        (
            "user,mtu=1500,mtu=1500",
            "--net: option `mtu` is given twice",
        ),
        (
            "user,mtu=575",
            "--net: `575` is not a value for `mtu`, expected 576 to 65535",
        ),
        (
            "user,rx",
            "--net: `` is not a value for `rx`, expected ring, direct, direct-discard or copy",
        ),
        (
            "user,mac=01:00:00:00:00:00",
            "--net: `01:00:00:00:00:00` is not a value for `mac`, \
             expected a unicast address such as 52:54:00:12:34:56",
        ),
    ];
    for (spec, text) in table {
        assert_eq!(parse_net(spec).unwrap_err().to_string(), text, "{spec}");
    }
}

#[test]
fn forwards() {
    let table = [
        ("8080:80", Protocol::Tcp, "127.0.0.1:8080", 80),
        ("tcp:0.0.0.0:1:2", Protocol::Tcp, "0.0.0.0:1", 2),
        ("udp:5353:53", Protocol::Udp, "127.0.0.1:5353", 53),
        ("udp:[::1]:5353:53", Protocol::Udp, "[::1]:5353", 53),
    ];
    for (spec, protocol, host, guest_port) in table {
        let host = host.parse().unwrap();
        assert_eq!(
            parse_forward(spec),
            Ok(Forward {
                protocol,
                host,
                guest_port
            }),
            "{spec}"
        );
    }
    for spec in [
        "",
        ":",
        "80",
        "0:80",
        "80:0",
        "80:65536",
        "x:80:80",
        "::1:80:80",
        "sctp:1:2",
        "[::1:80:80",
    ] {
        assert!(parse_forward(spec).is_err(), "{spec}");
    }
    let refused = config(&["--net", "null", "-p", "1:2"]);
    assert_eq!(refused, Err(ConfigError::ForwardWithoutUser));
    let NetKind::User(user) = config(&["-p", "1:2", "-p", "udp:3:4"])
        .unwrap()
        .net
        .unwrap()
        .kind
    else {
        panic!("not user")
    };
    assert_eq!(user.forwards.len(), 2);
}

#[test]
fn memory_is_private_unless_it_is_to_be_shared() {
    let parse = |memory: &str| {
        let cli =
            crate::cli::Cli::try_parse_from(["wonton", "run", "--kernel", "k", "--memory", memory])
                .unwrap();
        let crate::cli::Command::Run(args) = cli.command else {
            panic!("not run")
        };
        RunConfig::try_from(args).map(|config| (config.memory, config.backing))
    };
    assert_eq!(parse("64M"), Ok((64 << 20, Backing::Private)));
    assert_eq!(parse("64M,shared"), Ok((64 << 20, Backing::Shared)));
    assert!(parse("64M,huge").is_err());
}

fn tap(spec: &str) -> Result<TapOptions, ConfigError> {
    match parse_net(spec)?.map(|net| net.kind) {
        Some(NetKind::Tap(tap)) => Ok(tap),
        other => panic!("{other:?}"),
    }
}

#[test]
fn taps() {
    let plain = tap("tap").unwrap();
    assert_eq!(plain, TapOptions::default());
    assert_eq!(plain.source, TapSource::Name("tap0".to_owned()));
    let full = tap("tap,name=t1,vhost=on,queues=4,mtu=9000").unwrap();
    assert_eq!(full.source, TapSource::Name("t1".to_owned()));
    assert_eq!(
        (full.vhost, full.queues, full.mtu),
        (Vhost::On, 4, Some(9000))
    );
    let passed = tap("tap,fd=3:5,vhost=off").unwrap();
    assert_eq!(passed.source, TapSource::Fds(vec![3, 5]));
    assert_eq!((passed.vhost, passed.queues), (Vhost::Off, 2));
    for (spec, problem) in [
        ("tap,name=a,fd=3", "exclude each other"),
        ("tap,fd=3:4,queues=3", "2 descriptors"),
        ("tap,fd=-1", "descriptor's number"),
        ("tap,fd=", "descriptor's number"),
        ("tap,queues=9", "1 to 8"),
        ("tap,queues=0", "1 to 8"),
        ("tap,vhost=yes", "on, off or auto"),
        ("tap,rx=ring", "no option `rx`"),
        ("tap,vhost=on,loss=1", "vhost=off"),
        ("user,vhost=on", "no option `vhost`"),
    ] {
        let error = parse_net(spec).unwrap_err().to_string();
        assert!(error.contains(problem), "{spec}: {error}");
    }
}

#[test]
fn a_tap_is_served_without_vhost() {
    let serve = |net: &str| {
        let cli = Cli::try_parse_from(["wonton", "serve", "--socket", "s", "--net", net]).unwrap();
        let Command::Serve(args) = cli.command else {
            panic!("not serve");
        };
        ServeConfig::try_from(args).map(|config| config.net.kind)
    };
    assert!(matches!(serve("tap"), Ok(NetKind::Tap(_))));
    let refused = serve("tap,vhost=on").unwrap_err().to_string();
    assert_eq!(refused, "--net: wonton serve needs vhost=off");
}
