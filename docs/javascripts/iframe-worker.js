/* Search without a server: browsers refuse to start a worker from a file, so it runs in a frame. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.waiting = [];
      document.body.append(this.frame);
      const inside = this.frame.contentDocument;
      inside.open();
      inside.write("<!doctype html><body></body>");
      inside.close();
      this.room = this.frame.contentWindow;
      this.receive = this.room.postMessage.bind(this.room);
      // In there, postMessage is what a worker says to its owner.
      this.room.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.createElement("script");
      script.src = url;
      script.onload = () => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.receive(data, "*"));
      };
      inside.body.append(script);
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.receive(data, "*");
    }
  };
}
