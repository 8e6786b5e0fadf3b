import { useLayoutEffect, useRef, useState } from "preact/hooks";

/** The width of an element in CSS pixels, as it changes; 0 before it is laid out. */
export function useWidth<T extends HTMLElement>(): [preact.RefObject<T>, number] {
  const ref = useRef<T>(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const element = ref.current;
    if (element === null) return;
    const observer = new ResizeObserver(([entry]) => {
      if (entry !== undefined) setWidth(Math.floor(entry.contentRect.width));
    });
    observer.observe(element);
    setWidth(Math.floor(element.clientWidth));
    return () => {
      observer.disconnect();
    };
  }, []);
  return [ref, width];
}
