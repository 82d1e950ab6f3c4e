//! `cargo xtask bench uml`: figures of some back-ends under the same UML guest.

use std::process::ExitCode;

use anyhow::Result;
use guest_images::Images;

use super::session::{Plan, Session};
use super::subject::Subject;
use super::workload::{Words, chosen};
use super::{html, report};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// What to measure: wonton, wonton:OPTIONS, rev:REF, passt, passt:mtu=BYTES; with commas between
    #[arg(long, default_value = "wonton,passt")]
    subjects: String,
    #[command(flatten)]
    plan: Plan,
    /// down1 down8 down16 up1 up8 up16 udp64 udp1400 udp16k rr crr idle1000, or all
    workloads: Vec<Words>,
}

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let subjects = subjects(&args.subjects)?;
    let images = Images::of_workspace()?;
    let session = Session::run(&images, &subjects, &chosen(&args.workloads), &args.plan)?;
    println!("{}", report::samples_table(&session));
    for line in report::idle_lines(&session) {
        println!("{line}");
    }
    println!("{}", report::footnote(&session));
    let json = report::write_json("uml.json", &session)?;
    let page = html::write("uml.html", "bench uml", &session, &[])?;
    println!("{} {}", json.display(), page.display());
    Ok(code(&session))
}

/// Subjects between commas. A word with `=` that follows an option list belongs to it.
fn subjects(list: &str) -> Result<Vec<Subject>> {
    let mut names: Vec<String> = Vec::new();
    for word in list.split(',') {
        match names.last_mut() {
            Some(last) if last.contains('=') && word.contains('=') && !word.contains(':') => {
                last.push(',');
                last.push_str(word);
            }
            _ => names.push(word.to_owned()),
        }
    }
    names.iter().map(|name| name.parse()).collect()
}

/// Says what went wrong; a failure if anything did.
pub(crate) fn code(session: &Session) -> ExitCode {
    let errors = session.errors();
    for error in &errors {
        eprintln!("error: {error}");
    }
    if errors.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_stay_with_their_subject() {
        let names = |text: &str| -> Vec<String> {
            let found = subjects(text).unwrap();
            found.into_iter().map(|s| s.name).collect()
        };
        assert_eq!(
            names("wonton,wonton:rx=copy,passt"),
            ["wonton", "wonton:rx=copy", "passt"]
        );
        assert_eq!(
            names("wonton:rx=copy,mtu=9000,passt:mtu=9000"),
            ["wonton:rx=copy,mtu=9000", "passt:mtu=9000"]
        );
    }
}
