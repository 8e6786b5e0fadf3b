import type { ComponentChildren } from "preact";

interface Props {
  id: string;
  title: string;
  note?: ComponentChildren;
  children: ComponentChildren;
}

/** A titled box; `note` is shown to the right of the title. */
export function Panel({ id, title, note, children }: Props) {
  return (
    <section class="panel" id={id} aria-labelledby={`${id}-title`}>
      <header>
        <h2 id={`${id}-title`}>{title}</h2>
        {note !== undefined && <span class="muted">{note}</span>}
      </header>
      {children}
    </section>
  );
}
