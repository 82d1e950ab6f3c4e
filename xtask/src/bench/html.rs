//! A report as one HTML file with its plots inside.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::Result;

use super::compare::Comparison;
use super::session::Session;
use super::{plot, report};

const STYLE: &str = "body{font:14px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}\
    svg{max-width:100%;height:auto}.runs{display:grid;grid-template-columns:repeat(auto-fill,minmax(340px,1fr));gap:8px}\
    pre{overflow-x:auto;font:12px/1.3 ui-monospace,monospace}li{margin:.2em 0}";

/// Writes `target/bench/NAME`.
pub(crate) fn write(
    name: &str,
    title: &str,
    session: &Session,
    comparisons: &[Comparison],
) -> Result<PathBuf> {
    let mut page = String::new();
    write!(
        page,
        "<!doctype html><html lang=en><meta charset=utf-8>\
         <meta name=viewport content='width=device-width'><title>{title}</title>\
         <style>{STYLE}</style><h1>{title}</h1><p>{}</p>",
        escaped(&report::footnote(session))
    )?;
    if !comparisons.is_empty() {
        let ratios: Vec<_> = comparisons
            .iter()
            .filter_map(|row| Some((format!("{} ({})", row.workload, row.unit), row.ratio?)))
            .collect();
        write!(
            page,
            "<h2>{} (B) by {} (A)</h2>{}<ul>",
            escaped(&session.subjects[1]),
            escaped(&session.subjects[0]),
            plot::ratios(&ratios)?
        )?;
        for row in comparisons {
            write!(page, "<li>{}: {}", row.workload, escaped(&row.verdict))?;
            if !row.doubts.is_empty() {
                write!(page, " — noisy: {}", row.doubts.join(", "))?;
            }
        }
        page += "</ul>";
    }
    page += "<h2>Runs</h2><p>";
    for (subject, name) in session.subjects.iter().enumerate() {
        let colour = plot::colour(subject);
        write!(
            page,
            "<span style='color:rgb({},{},{})'>&#9679;</span> {} ",
            colour.0,
            colour.1,
            colour.2,
            escaped(name)
        )?;
    }
    page += "</p><div class=runs>";
    for workload in &session.workloads {
        page += &plot::runs(session, *workload)?;
    }
    page += "</div>";
    if !comparisons.is_empty() {
        let table = report::comparison_table(comparisons).to_string();
        write!(page, "<h2>Compared</h2><pre>{}</pre>", escaped(&table))?;
    }
    let table = report::samples_table(session).to_string();
    write!(
        page,
        "<h2>Figures</h2><pre>{}</pre></html>",
        escaped(&table)
    )?;
    report::write(name, &page)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_become_markup() {
        assert_eq!(escaped("a<b> & c"), "a&lt;b&gt; &amp; c");
    }
}
