// SPDX-License-Identifier: Apache-2.0
//! The page with all figures. Everything is in the file: pictures inline, no script, no font, no address.

use pagetide_sim::figures::{Beside, Computed};

use super::Picture;

const HEAD: &str = "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
<title>Figures of HyperTRIO</title>\n<style>\n\
body { font: 16px/1.45 sans-serif; max-width: 100rem; margin: 2rem auto; padding: 0 1rem; color: #222 }\n\
table { border-collapse: collapse; margin: 1rem 0; font-size: 14px }\n\
th, td { border: 1px solid #ccc; padding: .25rem .6rem; text-align: left; vertical-align: top }\n\
th { background: #f4f4f4 }\n\
.row { display: flex; flex-wrap: wrap; gap: 1rem } .row svg { max-width: 100%; height: auto }\n\
summary { cursor: pointer; margin: .5rem 0 }\n\
</style></head><body>\n<h1>Figures of HyperTRIO, by the model</h1>\n";

/// The whole page.
pub(super) fn page(drawn: &[(&Computed, Vec<Picture<'_>>)], packets: u64) -> String {
    let mut page = HEAD.to_owned();
    page += &format!(
        "<p>Synthetic tenants, {packets} packets a run, rules of the paper's text. The paper leaves three things \
         open: what a walk costs, what an entry of the PTB holds, and where a packet's notification goes. Each \
         figure is computed under every reading that matters to it; the first is shown, the others are behind it. \
         The paper's numbers are those of its text. Data and study of a figure are in the files named at it; \
         <code>pagetide sim sweep</code> runs a study again, or a changed one.</p>\n<p>"
    );
    for (figure, _) in drawn {
        page += &format!("<a href=\"#f-{0}\">{0}</a> ", escaped(figure.id));
    }
    page += "</p>\n";
    for (figure, pictures) in drawn {
        page += &section(figure, pictures);
    }
    page + "</body></html>\n"
}

fn section(figure: &Computed, pictures: &[Picture<'_>]) -> String {
    let files: Vec<String> = figure
        .files
        .iter()
        .map(|file| format!("<a href=\"{0}\">{0}</a>", escaped(file)))
        .collect();
    let mut text = format!(
        "<h2 id=\"f-{0}\">{0}: {1}</h2>\n<p>HyperTRIO {2}. {3}. {4}</p>\n",
        escaped(figure.id),
        escaped(figure.title),
        escaped(figure.section),
        escaped(figure.about),
        files.join(", ")
    );
    let groups: Vec<&[Picture<'_>]> = pictures
        .chunk_by(|a, b| a.panel.reading == b.panel.reading)
        .collect();
    for (at, group) in groups.iter().enumerate() {
        let reading = escaped(&group[0].panel.reading);
        let row: String = group.iter().map(|picture| inline(&picture.svg)).collect();
        text += &match (at, reading.as_str()) {
            (0, "") => format!("<div class=\"row\">\n{row}</div>\n"),
            (0, _) => format!("<p>{reading}:</p>\n<div class=\"row\">\n{row}</div>\n"),
            _ => format!(
                "<details><summary>{reading}</summary>\n<div class=\"row\">\n{row}</div></details>\n"
            ),
        };
    }
    text + &numbers(&figure.beside)
}

/// An SVG file as an element of a page: without what stands before the element.
fn inline(svg: &str) -> String {
    let from = svg.find("<svg").unwrap_or(0);
    // The element's size is that of its view box; the page makes it smaller where it has no room.
    svg[from..].to_owned()
}

fn numbers(beside: &[Beside]) -> String {
    let Some(first) = beside.first() else {
        return String::new();
    };
    let mut text = "<table><tr><th></th><th>paper</th>".to_owned();
    let alike = beside.iter().all(|one| {
        let names = |one: &Beside| {
            one.ours
                .iter()
                .map(|(name, _)| name.clone())
                .collect::<Vec<_>>()
        };
        names(one) == names(first)
    });
    for (reading, _) in &first.ours {
        let name = match reading.as_str() {
            "" => "model".to_owned(),
            _ if !alike => "model".to_owned(),
            name => escaped(name),
        };
        text += &format!("<th>{name}</th>");
    }
    text += "</tr>\n";
    for one in beside {
        text += &format!(
            "<tr><td>{}</td><td>{}</td>",
            escaped(one.what),
            escaped(one.paper)
        );
        for (_, ours) in &one.ours {
            text += &format!("<td>{}</td>", escaped(ours));
        }
        text += "</tr>\n";
    }
    text + "</table>\n"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
