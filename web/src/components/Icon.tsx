import type { Appearance, Shape } from "../tone";

// 16 x 16. The outline differs for each, so that the meaning does not depend on color.
const OUTLINES: Record<Shape, preact.JSX.Element> = {
  check: (
    <>
      <circle cx="8" cy="8" r="7" fill="currentColor" stroke="none" />
      <path d="M4.8 8.3 7 10.5l4.3-4.8" stroke="var(--surface)" />
    </>
  ),
  clock: (
    <>
      <circle cx="8" cy="8" r="6.2" />
      <path d="M8 4.4V8l2.4 1.6" />
    </>
  ),
  triangle: (
    <>
      <path d="M8 1.2 15.2 14H.8Z" fill="currentColor" stroke="none" />
      <path d="M8 6v3.6M8 11.6v.3" stroke="var(--surface)" />
    </>
  ),
  octagon: (
    <>
      <path d="M5 1h6l4 4v6l-4 4H5l-4-4V5Z" fill="currentColor" stroke="none" />
      <path d="m5.6 5.6 4.8 4.8m0-4.8-4.8 4.8" stroke="var(--surface)" />
    </>
  ),
  loop: (
    <>
      <path d="M13.6 6.2A6 6 0 0 0 3 5M2.4 9.8A6 6 0 0 0 13 11" />
      <path d="M2.6 2v3.2h3.2M13.4 14v-3.2h-3.2" />
    </>
  ),
  square: <rect x="2.5" y="2.5" width="11" height="11" rx="1.5" fill="currentColor" stroke="none" />,
  question: (
    <>
      <circle cx="8" cy="8" r="6.2" stroke-dasharray="2.4 1.5" />
      <path d="M6.2 6.3a1.8 1.8 0 1 1 2.6 1.7c-.6.3-.8.6-.8 1.2M8 11.3v.2" />
    </>
  ),
};

/** `label` is for screen readers; omit it if the adjacent text has the same meaning. */
export function Icon({ appearance, label, size = 16 }: { appearance: Appearance; label?: string; size?: number }) {
  return (
    <svg
      class={`icon tone-${appearance.tone}`}
      width={size}
      height={size}
      viewBox="0 0 16 16"
      fill="none"
      stroke="currentColor"
      stroke-width="1.6"
      stroke-linecap="round"
      stroke-linejoin="round"
      {...(label === undefined ? { "aria-hidden": true } : { role: "img", "aria-label": label })}
    >
      {OUTLINES[appearance.shape]}
    </svg>
  );
}

/** An icon and a word in the color of the tone. */
export function Badge({ appearance, text }: { appearance: Appearance; text: string }) {
  return (
    <span class={`badge tone-${appearance.tone}`}>
      <Icon appearance={appearance} size={13} />
      {text}
    </span>
  );
}
